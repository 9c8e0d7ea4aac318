"""Groups of ranks, and what their ranks do together."""

from roll.parallel.degrees import ParallelDegrees, RankCoordinates, SplitOver

__all__ = ["ParallelDegrees", "RankCoordinates", "SplitOver"]
