"""Other libraries' plug-in points. Nothing here is imported by `import splitkv`: import the module you use."""
