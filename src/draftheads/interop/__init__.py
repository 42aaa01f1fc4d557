"""Other projects: one module for each. The rest of the package knows none of them."""
