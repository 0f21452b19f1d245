"""Pure planning: a logical program on physical devices, how shards move between shardings, and what memory it takes."""
