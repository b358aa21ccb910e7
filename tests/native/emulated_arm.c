/* What the kernels take of the C library, for an emulator without one: threads run at once, one after the other. */
#include <pthread.h>
#include <stddef.h>

void *memcpy(void *restrict out, const void *restrict in, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) ((volatile unsigned char *)out)[i] = ((const unsigned char *)in)[i];
  return out;
}

void *memset(void *out, int value, size_t nbytes) {
  for (size_t i = 0; i < nbytes; i++) ((volatile unsigned char *)out)[i] = (unsigned char)value;
  return out;
}

int strcmp(const char *left, const char *right) {
  while (*left && *left == *right) left++, right++;
  return (unsigned char)*left - (unsigned char)*right;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  (void)thread, (void)attributes;
  run(argument);
  return 0;
}

int pthread_join(pthread_t thread, void **result) {
  (void)thread, (void)result;
  return 0;
}

int pthread_once(pthread_once_t *once, void (*run)(void)) {
  if (*once == 0) run();
  *once = 1;
  return 0;
}
