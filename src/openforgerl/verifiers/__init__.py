"""Verifiers: from the state an agent left to a verdict, or to a failure that is never a reward."""
