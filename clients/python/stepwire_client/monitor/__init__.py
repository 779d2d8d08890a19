"""What a server's metrics show: the panels of dashboards and reports, and the live view of `stepwire top`."""
