"""Model families: one file each, which declares everything that is particular to one.

A new family is a file `NAME.py` with a `FAMILY`, or a `Family` of your own anywhere, which settings name as
`module:Name`. Importing this package loads neither torch nor pydantic.
"""

from roll.families.family import Family, RopeType
from roll.families.registry import FAMILIES, find_family

__all__ = ["FAMILIES", "Family", "RopeType", "find_family"]
