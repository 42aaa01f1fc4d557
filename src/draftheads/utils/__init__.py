"""What any program needs: files, caches, progress, counts in words, facts about the machine."""
