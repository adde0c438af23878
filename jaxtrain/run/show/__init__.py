"""What people see of a run: tables, progress, pictures, notebooks."""
