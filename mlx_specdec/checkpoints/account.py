"""The former place of `Contents`, for the readers in `formats/` until they import the new one."""

from .tensor_report import Contents as Contents
