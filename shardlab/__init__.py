"""The code that provision, jobs, trainers and collect share, such as the types of a cluster, a matrix, a run and a record."""

__version__ = "0.1.0"

# The folders of shardlab's source that are packages of Python.
PACKAGES = ("shardlab", "matrices", "templates", "provision", "jobs", "trainers", "collect")
