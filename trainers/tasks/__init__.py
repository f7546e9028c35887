"""The tasks of the workloads on the menu: model, data and loss. Each module has a function `build`, which makes a task.

torchvision is imported here first, in a way that works with every build of torch. Without this, some builds of torch cannot
import torchvision and the models of transformers.
"""

from trainers.tasks import vision_library

vision_library.import_torchvision()
