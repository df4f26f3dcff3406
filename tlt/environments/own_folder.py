"""Empty the folder in which an environment's process runs, for the next answer."""

import os

from tlt.isolation.limits import remove_folder


def empty_folder(folder: str) -> None:
    """Return to it and remove what the answer before has left, wherever that has gone since."""
    os.chdir(folder)
    for entry in os.scandir(folder):
        remove_folder(entry.path)
