"""The error of this package that a user may meet while data is prepared, checked or read."""


class DataError(RuntimeError):
    """Data on disk, in an object store or in the cache cannot be used; the message names the file and the remedy."""
