"""Programs that a user runs against a running fleet to see a layout work; tests run them too."""
