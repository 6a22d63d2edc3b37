"""Methods that are wrong, each in one way, through the public protocol alone: what `skipstone check` must find.

A module holds METHOD. None of them is known to the check.
"""
