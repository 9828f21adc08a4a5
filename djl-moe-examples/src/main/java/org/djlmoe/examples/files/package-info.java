/**
 * Folders that last as long as a command: a name's beginning comes in, a folder goes out, and
 * nothing is left of it however the command ends.
 */
package org.djlmoe.examples.files;
