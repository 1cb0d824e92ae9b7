"""The default method beside a grid search that is tuned on the test set."""
