"""Text: files and folders to token windows or packed documents."""
