"""The benchmark suite: Holdfast, its peers and the physical limit, side by side in one run."""
