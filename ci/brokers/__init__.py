"""Real brokers under real clients, plain and preloaded. Called by ci/brokers_check.py."""
