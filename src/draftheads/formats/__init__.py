"""How other projects store draft heads: read into heads of this package, and written from them.

One file for each outside project: how its files are told, read and written, and the commands of its engines.
``reading.py`` lists them.
"""
