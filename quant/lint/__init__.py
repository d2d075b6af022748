"""What is wrong with an `ignore` list, and the list that every reader takes alike.

May import selection and formats.
"""
