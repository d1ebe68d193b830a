"""What a reader of a format raises inside its room."""


class Malformed(Exception):
    """The rest of a sentence that begins with the file's name."""
