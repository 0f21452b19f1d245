"""`pw.pipeline` and `pw.accumulate_gradients`: microbatches, schedules, and the plot of a schedule."""
