"""The options of commands that import something slow, apart from it: ``--help`` and wrong options answer at once.

The first sentence under a field is its line in ``--help``; ``--help-all`` shows all sentences. ``BASIC`` of a class
names the options that come first.
"""
