"""What happened when: Chrome traces of copies, compute, updates and waits."""
