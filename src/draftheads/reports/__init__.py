"""Pages, plots and tables of what was measured. Nothing below this floor knows how results are shown."""
