"""Finding the tree of guesses that pays."""
