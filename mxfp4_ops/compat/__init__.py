"""The signatures of other libraries, on the ops of this one."""
