"""What every process of a cluster needs of its machine: configuration, environment, children, descriptors, folders."""
