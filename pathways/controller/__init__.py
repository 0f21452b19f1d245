"""The controller process: hosts, clients, slices and programs; recovery; the control service."""
