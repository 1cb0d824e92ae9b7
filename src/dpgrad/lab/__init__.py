"""Models, experiments and reports: what is built on training."""
