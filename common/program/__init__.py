"""Code that both programs share: flags, signals and exits, plug-ins, and checks of a machine."""
