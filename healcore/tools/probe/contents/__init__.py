"""What checkpoints hold, read without executing anything and a piece at a time."""

from healcore.tools.probe.contents.contents import Array, Contents, dotted
from healcore.tools.probe.contents.opening import open_contents

__all__ = ["Array", "Contents", "dotted", "open_contents"]
