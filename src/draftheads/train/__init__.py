"""Trains draft heads for a frozen model; ``joint`` tunes the model, too."""
