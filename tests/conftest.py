"""No test fails because the machine is slow: hypothesis gives each example as long as it takes."""

from hypothesis import settings

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
