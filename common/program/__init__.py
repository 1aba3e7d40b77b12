"""What both programs share: flags, signals and exits, plug-ins, checks of a machine."""
