"""The options of each command. Nothing slow is imported here, so that ``--help`` and wrong options answer at once.

The first sentence under a field is its line in ``--help``; ``--help-all`` shows all sentences. ``BASIC`` of a class
names the options that come first.
"""
