"""What a user runs on his own machine against a running fleet, to see a layout work."""
