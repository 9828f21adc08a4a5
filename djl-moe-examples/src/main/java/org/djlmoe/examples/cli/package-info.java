/**
 * The command line {@code moe}: arguments come in, the examples and the library do the work,
 * tables, files and an exit code go out.
 */
package org.djlmoe.examples.cli;
