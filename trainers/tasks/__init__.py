"""The tasks: what the menu entries of workloads build. Each module has a function `build`.

torchvision is imported first, in the way that works with every torch: torchvision and transformers cannot be imported before.
"""

from trainers.tasks import vision_library

vision_library.load()
