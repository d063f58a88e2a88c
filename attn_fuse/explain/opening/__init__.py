"""Opening: a Python file becomes a module where packages, a GPU or a library's version are missing."""
