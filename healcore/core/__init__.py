"""The pure core: state machines written against an array namespace, without a framework."""
