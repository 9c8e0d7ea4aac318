"""How ranks are divided into groups, and what they do together."""

from roll.parallel.degrees import ParallelDegrees, RankCoordinates, SplitOver

__all__ = ["ParallelDegrees", "RankCoordinates", "SplitOver"]
