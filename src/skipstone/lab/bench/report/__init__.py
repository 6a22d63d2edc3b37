"""Result files as tables, figures and pages."""
