"""The writer of HTML reports: pages, tables and plots, for simulations and load tests alike."""
