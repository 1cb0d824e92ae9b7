"""One private step: what it computes (`work`), its two bodies, and who runs them (`taped`, `graphed`)."""
