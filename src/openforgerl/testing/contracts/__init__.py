"""What every implementation of a protocol must do, as functions that any test can run."""
