"""What a client holds of a cluster: a remote one, an embedded one, and the launcher of a local one."""
