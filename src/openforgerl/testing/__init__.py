"""What users and our own tests test with: a tiny model, fake sandboxes, contract suites."""
