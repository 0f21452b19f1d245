"""What every process of a cluster needs on its machine: configuration, environment, children, descriptors, folders."""
