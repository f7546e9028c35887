"""The matrices that ship with the package, as data."""
