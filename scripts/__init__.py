"""The `outrider` command, the quickstart, and the making of the embedded target."""
