"""How other projects store draft heads: read into heads of this package, and written from them.

One file for each outside project. A format is told by the names and shapes of its tensors.
"""
