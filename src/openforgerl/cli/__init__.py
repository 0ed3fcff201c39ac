"""Parsing and printing; the only room that knows all others (DESIGN §7)."""
